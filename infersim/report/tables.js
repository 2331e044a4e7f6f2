document.addEventListener("click", (event) => {
  const button = event.target.closest("table.sortable th button");
  if (!button) return;
  const head = button.parentElement, table = button.closest("table"), column = head.cellIndex;
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = (row) => { const v = row.cells[column].dataset.v; const n = Number(v); return v !== "" && !Number.isNaN(n) ? n : v; };
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    const x = key(a), y = key(b);
    const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return down ? -order : order;
  });
  table.tBodies[0].append(...rows);
});
