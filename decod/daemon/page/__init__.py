"""The web page of a run, and its metrics for Prometheus, over HTTP.

`page_server` listens, `http_server` serves, `app` answers requests, `feed` says what the page
shows, `acting` what its reader may do, and `exposition` what Prometheus reads. The page itself is
in `static`: plain HTML, CSS and JavaScript modules, and uPlot.
"""
