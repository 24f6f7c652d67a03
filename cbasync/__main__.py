"""The command line: `python -m cbasync COMMAND`. Without a command it runs the demo.

A command is one function here: its first docstring line is the help, it declares its
arguments and returns what to run. What it needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Run = Callable[[argparse.Namespace], None]


def demo_command(parser: argparse.ArgumentParser) -> Run:
    """Answer 16 prompts twice, in turns and one batch ahead; draw both timelines."""
    add = parser.add_argument
    add("--model", default="smollm2", help="name, folder or hub id (default: smollm2)")
    add("--device", default="auto", help="auto, threads or cuda (default: auto)")
    add("--prompts", type=Path, metavar="FILE", help="prompts, one JSON object a line")
    add("--depth", type=int, default=1, help="batches the host runs ahead (default: 1)")
    add("--json", action="store_true", help="print numbers only, as JSON")

    def run(args: argparse.Namespace) -> None:
        from cbasync import demo
        from cbasync.simulate import published_experiment

        setup = demo.set_up(args.model, args.device, args.prompts, args.depth)
        result = demo.run(setup)
        if args.json:
            print(_as_json(result.as_json()))
        else:
            print(f"{result}\n\n{published_experiment()}")

    return run


def bench_command(parser: argparse.ArgumentParser) -> Run:
    """Measure sync and async on a GPU; or the host's work; or a peer on the CPU."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--host-only", action="store_true", help="host work per step, no model"
    )
    what.add_argument(
        "--peer", choices=["transformers"], help="our engine against generate_batch"
    )
    what.add_argument(
        "--series",
        choices=["ladder", "host-delay", "sweep", "depth"],
        help="many runs on the GPU instead of one a mode",
    )
    add = parser.add_argument
    add("--model", help="default: random-8b on the GPU, smollm2 for --peer")
    add("--json", action="store_true", help="print the result as JSON")
    add("--output", type=Path, metavar="FILE", help="write the result as JSON")
    _gpu_options(parser)
    _cpu_options(parser)

    def run(args: argparse.Namespace) -> None:
        from cbasync import bench

        if args.host_only:
            result, show = bench.bench_host(args.steps), bench.host_table
        elif args.peer:
            model = args.model or "smollm2"
            result = bench.bench_peer(model, args.requests, args.max_tokens)
            show = bench.peer_table
        else:
            result, show = _bench_gpu(args)
        if args.output:
            args.output.write_text(_as_json(result) + "\n")
        print(_as_json(result) if args.json else show(result))

    return run


def _cpu_options(parser: argparse.ArgumentParser) -> None:
    """Options of `bench --host-only` and `bench --peer`."""
    add = parser.add_argument_group("--host-only and --peer").add_argument
    steps = "decode steps to time (default: 300)"
    add("--steps", type=_positive, default=300, help=steps)
    add("--requests", type=_positive, default=32, help="for --peer (default: 32)")
    add("--max-tokens", type=_positive, default=64, help="for --peer (default: 64)")


def _gpu_options(parser: argparse.ArgumentParser) -> None:
    """Options of `bench` on a GPU."""
    add = parser.add_argument_group("on a GPU").add_argument
    add("--batch", type=_positive, default=32, help="requests (default: 32)")
    add("--prompt-tokens", type=_positive, default=16, help="each (default: 16)")
    add("--new-tokens", type=_positive, default=8192, help="each (default: 8192)")
    add("--modes", default="sync,async", help="one or both (default: sync,async)")
    add("--depth", type=int, default=1, help="batches the host runs ahead (default: 1)")
    add("--compile", action="store_true", help="compile the decode step, about 30 s")
    add("--merge", action="store_true", help="merge q,k,v and gate,up")
    add("--no-graphs", action="store_true", help="launch kernel by kernel")
    add("--host-delay-ms", type=float, default=0.0, help="host time added to each step")
    add("--trace", type=Path, metavar="FILE", help="write a trace of each mode")


def _bench_gpu(args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Run one experiment or a series; its result, and how to show it."""
    import torch

    from cbasync import experiments, gpu_bench, published, series_tables
    from cbasync.models import load_model

    if not torch.cuda.is_available():
        raise ValueError(
            "bench measures a GPU and this machine has none: use --host-only or --peer"
        )
    modes = args.modes.split(",")
    if not set(modes) <= {"sync", "async"}:
        raise ValueError(f"modes are {args.modes!r}: give sync, async or sync,async")
    setting = gpu_bench.Setting(
        batch=args.batch,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        depth=args.depth,
        cuda_graphs=not args.no_graphs,
        compile=args.compile,
        merge=args.merge,
        host_delays_ms=(args.host_delay_ms,),
    )
    loaded = load_model(args.model or "random-8b", device="cuda")
    if args.series:
        result = experiments.SERIES[args.series](loaded, setting)
        return result, series_tables.series_table
    return published.bench_gpu(loaded, setting, modes, args.trace), published.gpu_table


def sim_command(parser: argparse.ArgumentParser) -> Run:
    """Run both engines on the virtual device, on the machine of a cost model."""
    add = parser.add_argument
    add(
        "--cost", default="article", help="article, laptop or a file (default: article)"
    )
    add(
        "--steps", type=_positive, default=8192, help="tokens a request (default: 8192)"
    )
    add("--batch", type=_positive, default=32, help="requests (default: 32)")
    add("--depth", type=int, default=1, help="batches the host runs ahead (default: 1)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--json", action="store_true", help="print numbers, as JSON")
    instead.add_argument(
        "--html", metavar="FILE", help="write the page for this machine"
    )

    def run(args: argparse.Namespace) -> None:
        from cbasync import page
        from cbasync.devices.costs import cost_model
        from cbasync.simulate import PROMPT, simulate

        costs, batch, depth = cost_model(args.cost), args.batch, args.depth
        if args.html:
            context = PROMPT + args.steps // 2  # as many as there are half-way
            page.write_page(args.html, costs, batch=batch, depth=depth, context=context)
            print(f"wrote {args.html}: open it in a browser")
            return
        result = simulate(costs, steps=args.steps, batch=batch, depth=depth)
        print(_as_json(result.summary()) if args.json else result)

    return run


def races_command(parser: argparse.ArgumentParser) -> Run:
    """Break the engine in every known way and see whether the detector finds it."""
    add = parser.add_argument
    add("--device", default="sim,threads", help="where to run (default: sim,threads)")
    add("--json", action="store_true", help="print the table as JSON")

    def run(args: argparse.Namespace) -> None:
        import torch

        from cbasync.race_table import RaceTable

        torch.set_num_threads(1)  # many tiny models: more threads are in their own way
        result = RaceTable(args.device.split(","))
        print(_as_json(result.as_json()) if args.json else result)

    return run


def page_command(parser: argparse.ArgumentParser) -> Run:
    """Write a page with both timelines and sliders; it opens without Python."""
    parser.add_argument("file", metavar="FILE.html", help="where to write it")

    def run(args: argparse.Namespace) -> None:
        from cbasync import page

        page.write_page(args.file)
        print(f"wrote {args.file}: open it in a browser")

    return run


def assignments_command(parser: argparse.ArgumentParser) -> Run:
    """Hand out the assignments and grade what comes back; for teachers."""
    from cbasync.grading.command import declare

    return declare(parser)


COMMANDS: dict[str, Callable[[argparse.ArgumentParser], Run]] = {
    "demo": demo_command,
    "bench": bench_command,
    "sim": sim_command,
    "races": races_command,
    "page": page_command,
    "assignments": assignments_command,
}


def _positive(text: str) -> int:
    """A whole number of at least 1, as argparse wants it."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _as_json(result: dict[str, Any]) -> str:
    return json.dumps(result, indent=2, ensure_ascii=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 2 for what a user can put right, said in one line."""
    parser = argparse.ArgumentParser(
        prog="python -m cbasync", description=__doc__.partition("\n")[0]
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        words = str(command.__doc__)
        subparser = commands.add_parser(name, help=words, description=words)
        subparser.set_defaults(run=command(subparser))
    args = parser.parse_args(list(sys.argv[1:] if argv is None else argv) or ["demo"])
    try:
        args.run(args)
    except (ValueError, RuntimeError) as error:
        # Subclasses are failures inside: they keep their traceback.
        if type(error) not in (ValueError, RuntimeError):
            raise
        print(f"cbasync: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
