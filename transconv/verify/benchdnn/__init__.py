"""benchdnn's options and batch files: requests, jobs, reports."""
