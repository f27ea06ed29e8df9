"""What a Router counts and times, for /metrics, /stats and the Ray dashboard."""
