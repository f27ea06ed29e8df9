"""The Ray Serve application: Router, Verifier and Drafter deployments."""

__version__ = "0.1.0"
