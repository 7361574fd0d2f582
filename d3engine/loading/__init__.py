"""From what a user names, a directory, a device, a draft model, to what the engine runs on."""
