"""Files of requests, as OpenAI's batches have them: read line by line, answered many at once, written as they come."""
