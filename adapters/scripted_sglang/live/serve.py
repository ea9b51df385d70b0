"""``python -m scripted_sglang.live.serve ...``: SGLang's server with stubs for modules that are not installed.

SGLang's processes are spawned, and each of them imports this module first.
"""

from __future__ import annotations

import sys

from sglang.launch_server import run_server
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

if __name__ == "__main__":
    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
