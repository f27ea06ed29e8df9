"""What is special about AWS Trainium: cores, environment variables, the installation's checks."""
