"""The Ray Serve application: Router, Verifier and Drafter deployments."""
