"""A tree of thoughts in forty lines: forks of a session propose, are scored, and the best go on.

    python benchmarks/tree_of_thoughts.py [--model MODEL] [--depth N] [--branches N] [--json FILE]

After Yao et al., Tree of Thoughts (NeurIPS 2023), breadth-first. The demo model's thoughts make
little sense; the point is the hit rate: branches share their common prefixes, in whatever order the
search visits them.
"""

from __future__ import annotations

from common.harness import Rows, machine, parser
from coppice import LLM, SamplingParams, Session


def search(llm: LLM, question: str, depth: int, branches: int, keep: int = 2) -> Session:
    """The best line after `depth` levels, each with `branches` thoughts for the `keep` best."""
    frontier = [llm.session(question)]
    for level in range(depth):
        thoughts = [thought for line in frontier for thought in line.fork(branches)]
        params = [
            SamplingParams(max_tokens=24, temperature=1.0, seed=level * 1000 + number, min_tokens=8)
            for number in range(len(thoughts))
        ]
        Session.generate_all(thoughts, params)
        ranked = sorted(thoughts, key=lambda thought: thought.score(" So this is right."))
        for dropped in [*frontier, *ranked[:-keep]]:
            dropped.close()
        frontier = ranked[-keep:]
    for dropped in frontier[:-1]:
        dropped.close()
    return frontier[-1]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="demo")
    options.add_argument("--depth", type=int, default=4)
    options.add_argument("--branches", type=int, default=4)
    args = options.parse_args()
    llm = LLM(args.model)
    depth = 2 if args.quick else args.depth
    best = search(llm, "People: The badge of Mara Ellison is NK-48.", depth, args.branches)
    counts = llm.cache_report().accounts.overall.since_start
    row = {"depth": depth, "branches": args.branches, "hit_rate": round(counts.hit_rate, 3)}
    Rows(args.json).add(benchmark="tree of thoughts", **row, best=best.text, machine=machine())


if __name__ == "__main__":
    main()
