"""Looking at models: what they cost and what they do."""
