"""What is reported to the accounts, until it is processed."""
