"""What every layer may use: files, environment variables, child processes, bars, fields that are options at once."""
