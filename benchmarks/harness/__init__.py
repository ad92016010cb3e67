"""What every topic of the benchmarks uses: models, tables, quiet machines, processes, results."""
