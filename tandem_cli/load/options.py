"""From the options of `tandem bench` to a workload. Pure but for the workload's file."""

from dataclasses import dataclass, replace

from tandem_cli.load.workload import BadWorkload, Lengths, Level, Loop, Workload, find_workload, load_workload

#: Most levels of one run, and most clients at once: each is a stream of this process.
LEVELS_MAX = 32
CLIENTS_MAX = 4096
LENGTH_MAX = 10_000_000
DEFAULT_CONCURRENCY = "1,8"
DEFAULT_INPUT = "512"
DEFAULT_OUTPUT = "128"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """As they were given; empty and None are what was not given."""

    workload: str = ""
    concurrency: str = ""
    rate: str = ""
    input_tokens: str = ""
    output_tokens: str = ""
    requests: int | None = None
    cancel_share: float = 0.0


def workload_of(options: LoadOptions) -> Workload:
    """What to send. Raises BadWorkload naming the option and its limit."""
    if options.concurrency and options.rate:
        raise BadWorkload("--concurrency and --rate exclude each other: clients at once, or requests a second")
    if options.workload:
        if options.input_tokens or options.output_tokens:
            raise BadWorkload("--workload says how long prompts and answers are: leave out --input and --output")
        made = load_workload(find_workload(options.workload))
    else:
        made = _fixed(options)
    if options.concurrency or options.rate or not options.workload:
        made = replace(made, levels=levels_of(options.concurrency, options.rate))
    if options.requests is not None:
        made = replace(made, requests_min=options.requests, requests_per_client=0)
    return replace(made, cancel_share=options.cancel_share)


def _fixed(options: LoadOptions) -> Workload:
    prompt = lengths_of("--input", options.input_tokens or DEFAULT_INPUT)
    output = lengths_of("--output", options.output_tokens or DEFAULT_OUTPUT)
    name = f"{words_of(prompt)}/{words_of(output)}"
    about = f"{words_of(prompt)} random tokens in, {words_of(output)} out"
    return Workload(name, about, 0, prompt, output, None, (), 3, 6, 60.0, None)


def levels_of(concurrency: str, rate: str) -> tuple[Level, ...]:
    """Levels of a closed or an open loop. Raises BadWorkload."""
    option, text, loop = (
        ("--rate", rate, Loop.OPEN) if rate else ("--concurrency", concurrency or DEFAULT_CONCURRENCY, Loop.CLOSED)
    )
    try:
        values = [float(part) if rate else float(int(part)) for part in text.split(",")]
    except ValueError:
        raise BadWorkload(f"{option} {text}: it must be {'numbers' if rate else 'whole numbers'} separated by commas") from None
    if len(values) > LEVELS_MAX:
        raise BadWorkload(f"{option} {text}: at most {LEVELS_MAX} levels")
    if not all(0 < value <= CLIENTS_MAX for value in values):
        raise BadWorkload(f"{option} {text}: each must be over 0 and at most {CLIENTS_MAX}")
    return tuple(Level(loop, value) for value in values)


def lengths_of(option: str, text: str) -> Lengths:
    """`512`, or `16-1024`. Raises BadWorkload."""
    least, _, most = text.partition("-")
    if not least.isdecimal() or not (most or least).isdecimal():
        raise BadWorkload(f"{option} {text}: it must be a number of tokens, as 512, or a range, as 16-1024")
    made = Lengths(int(least), int(most or least))
    if not 0 < made.least <= made.most <= LENGTH_MAX:
        raise BadWorkload(f"{option} {text}: it must rise, from 1 or more up to {LENGTH_MAX}")
    return made


def words_of(lengths: Lengths) -> str:
    """As it is written in options."""
    return f"{lengths.least}" if lengths.least == lengths.most else f"{lengths.least}-{lengths.most}"


def longest(workload: Workload) -> int:
    """Most tokens of prompt and answer together in one of its requests."""
    found = []
    if workload.trace is not None:
        found += [line.prompt_tokens + line.output_tokens for line in workload.trace.lines]
    pairs = [(workload.prompt, workload.output)]
    if workload.beside is not None:
        pairs.append((workload.beside.prompt, workload.beside.output))
    found += [prompt.most + output.most for prompt, output in pairs if prompt is not None and output is not None]
    return max(found)


def at_level(workload: Workload, level: Level, requests: int | None) -> Workload:
    """The workload of one level: with an open loop, `requests` arrive on average."""
    if level.loop is Loop.CLOSED or requests is None:
        return workload
    return replace(workload, arrive_s=requests / level.value)
