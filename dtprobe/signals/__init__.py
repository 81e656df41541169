"""What a night says to the outside: Prometheus metrics in a file or over HTTP, and a webhook on a new regression.

`metrics` makes them from a `summary.json`, `serve` shows a night in progress, `webhook` tells of what is new, and `night` is what
`dtprobe nightly` uses of them. Alert rules, a dashboard and schedules lie in `reports/`.
"""
