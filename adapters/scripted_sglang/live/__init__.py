"""SGLang's own server under scripts: its front end, its scheduler process, its event loops, which stop at our gate."""
