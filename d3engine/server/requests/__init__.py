"""From the bytes of a body to requests that the engine has checked, as far as interfaces share it."""
