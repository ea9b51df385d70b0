"""Runs scripts on SGLang's own server: front end, scheduler process and event loops, which stop at our gate."""
