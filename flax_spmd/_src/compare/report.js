// A click on a heading sorts a table, numbers by value; the field above it filters its rows.
for (const table of document.querySelectorAll('table')) {
  const body = table.tBodies[0];
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.addEventListener('click', () => {
      const down = head.getAttribute('aria-sort') === 'ascending';
      for (const other of table.tHead.rows[0].cells) other.removeAttribute('aria-sort');
      head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [key(a, column), key(b, column)];
        const order = typeof x === 'number' && typeof y === 'number' ? x - y : String(x).localeCompare(String(y));
        return down ? -order : order;
      });
      body.append(...rows);
    });
  });
  const search = table.parentElement.previousElementSibling;
  if (search && search.matches('input[type=search]')) {
    search.addEventListener('input', () => {
      const words = search.value.toLowerCase().split(/\s+/);
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
  }
}
