"""The web page of a run, and its metrics for Prometheus: read-only, over HTTP.

`page_server` listens, `app` answers requests, `feed` says what the page shows, `exposition` what
Prometheus reads. The page itself is in `static`: plain HTML, CSS and JavaScript modules.
"""
