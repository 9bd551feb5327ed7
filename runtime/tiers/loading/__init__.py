"""What comes back from tiers: found, loaded or computed; and what is hottest, unasked."""
