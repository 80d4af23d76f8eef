"""What the panels show, kept as plain data: series, the session, the knobs, and Qt table models over them.

`series`, `session` and `knobs` import no Qt; only the table models do.
"""
