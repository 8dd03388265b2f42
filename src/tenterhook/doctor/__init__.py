"""What is installed, and which features work with it: the report for a bug report."""
