"""What every task shares: configuration, optimiser, schedule, loaders that resume, callbacks and the engine."""
