"""In the HTTP server's process: names and texts of requests, answers, routes and metrics."""
