"""One model on several devices: rank 0 plans, every rank runs its part of each step."""
