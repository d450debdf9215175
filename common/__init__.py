"""What every strategy shares: the problem, its contract, the reference, counts, files, modules."""
