"""One engine for many callers at once: it steps by itself, and each caller awaits his own answer."""
