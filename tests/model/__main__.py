"""`python -m tests.model`: explore every state of a configuration, or find the bug of a variant.

python -m tests.model                               list the configurations and variants
python -m tests.model --config 1                    explore the real protocol in configuration 1
python -m tests.model --variant check-then-act      show the shortest path to its bug
python -m tests.model --variant check-then-act --rule OUTCOME_OVERWRITTEN
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from tests.model.configurations import CONFIGURATIONS
from tests.model.explorer import explore
from tests.model.protocol import LIBRARY, VARIANTS
from tests.model.state import Rule
from tests.model.surroundings import Machine
from tests.model.telling import as_json, table, tell


def main(arguments: list[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    if asked.variant is None and asked.config is None:
        _list()
        return 0
    setup, protocol = CONFIGURATIONS[asked.config or 0], LIBRARY
    if asked.variant is not None:
        variant = VARIANTS[asked.variant]
        protocol = variant.protocol
        setup = variant.setup if asked.config is None else setup
    look_for = tuple(Rule) if asked.rule is None else (Rule[asked.rule],)
    seen = explore(Machine(setup, protocol), look_for=look_for)
    found = seen.counterexample
    if asked.json:
        shown = {key: value for key, value in asdict(seen).items() if key != "counterexample"}
        print(json.dumps({"setup": str(setup), **shown, "counterexample": found and as_json(found, setup)}))
    else:
        print(f"{asked.variant or 'real protocol'}: {setup}\n{tell(seen)}")
        print(table(found, setup) if found is not None else "no rule is broken")
    return int(found is not None)


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m tests.model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", choices=VARIANTS, metavar="NAME", help="explore a protocol with this bug")
    parser.add_argument("--config", type=int, choices=range(len(CONFIGURATIONS)), metavar="N", help="explore this one")
    parser.add_argument("--rule", choices=Rule.__members__, metavar="RULE", help="look only for this rule")
    parser.add_argument("--json", action="store_true", help="output JSON")
    return parser


def _list() -> None:
    print("configurations:")
    for number, setup in enumerate(CONFIGURATIONS):
        print(f"  {number:>2}  {setup}")
    print("variants:")
    for name, variant in VARIANTS.items():
        print(f"  {name:<28} {variant.bug}")
        print(f"  {'':<28}   breaks {', '.join(rule.name for rule in variant.breaks)}")


if __name__ == "__main__":
    sys.exit(main())
