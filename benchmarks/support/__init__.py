"""What the benchmarks share: how ranks are started, how competitors are timed, how results are shown and judged."""
