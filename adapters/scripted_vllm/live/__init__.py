"""vLLM's own server under scripts: its front end, its engine process, its busy loop, which stops at our gate."""
