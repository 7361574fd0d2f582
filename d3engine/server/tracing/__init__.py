"""One span per request, for collectors of OpenTelemetry; nothing of its packages is imported where it is off."""
