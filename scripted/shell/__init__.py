"""``scripted shell``: a debugger for a scheduler of any adapter, in this process.

A session is a list of script statements, each run as it is typed; undo runs the list without its last statements on a
new scheduler.
"""

from scripted.shell.debug_session import DebugSession
from scripted.shell.prompt import FilePrompt, Prompt, TerminalPrompt
from scripted.shell.web import WebPrompt, WebShell

__all__ = ["DebugSession", "FilePrompt", "Prompt", "TerminalPrompt", "WebPrompt", "WebShell"]
