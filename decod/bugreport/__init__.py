"""A bug report: logs and facts of a node in one archive, without what nobody else should see.

`contents` chooses files by name and takes nothing else, so keys, data and weights stay out.
`redaction` then removes what texts hold. `archive` writes the file, whole or not at all.
"""
