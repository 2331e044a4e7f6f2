"""Pictures of the studio for the documentation, in reports/: python tests/pictures.py"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))
from studio import browser, studio  # noqa: E402

SIZES = ((390, 1400, False), (1280, 1500, False), (2560, 1500, True))
"""width, height, dark"""


def main() -> None:
    with studio("llama-70b-4xh100") as address, browser() as page:
        for width, height, dark in SIZES:
            page.open(address, width, height, dark)
            page.until("document.body.dataset.settled", 600)
            page.picture(ROOT / "reports" / f"studio-{width}.png")


if __name__ == "__main__":
    main()
