"""Drafts: tokens that a sequence may continue with, which one step verifies together."""
