"""Runs a notebook without Jupyter: `python tests/notebooks.py docs/planning.ipynb` writes its outputs anew."""

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path


def execute(notebook):
    """The outputs of every code cell, in order: what it prints, and what its last expression shows."""
    names, found = {}, []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        body = ast.parse("".join(cell["source"])).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as text:
            exec(compile(ast.Module(body, []), "notebook", "exec"), names)
            value = None if last is None else eval(compile(ast.Expression(last.value), "notebook", "eval"), names)
        outputs = [{"name": "stdout", "output_type": "stream", "text": _lines(text.getvalue())}] * bool(text.getvalue())
        if value is not None:
            shown = {"data": _shown(value), "execution_count": len(found) + 1, "metadata": {}}
            outputs.append({"output_type": "execute_result", **shown})
        found.append(outputs)
    return found


def _shown(value):
    data = {"text/plain": _lines(repr(value))}
    if hasattr(value, "_repr_html_") and (html := value._repr_html_()):
        data["text/html"] = _lines(html)
    if hasattr(value, "_repr_png_"):
        data["image/png"] = base64.b64encode(value._repr_png_()).decode()
    return data


def _lines(text):
    return text.splitlines(keepends=True)


def main(path):
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, outputs) in enumerate(zip(code, execute(notebook), strict=True), 1):
        cell |= {"outputs": outputs, "execution_count": number}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
