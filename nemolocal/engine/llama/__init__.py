"""llama.cpp's low-level API as a `Backend`: nothing else imports llama_cpp. Each module is one side of it."""
