"""What the backbone is trained for; every task offers the same file names."""
