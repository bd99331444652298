"use strict";
// Whoever points at a part, or comes to it by the keyboard, sees what it is made of and who is made of it; a click
// keeps that until the next one, or Escape.
for (const scopes of document.querySelectorAll(".scopes")) {
  const parts = new Map([...scopes.querySelectorAll(".part")].map((part) => [part.id, part]));
  const needsOf = (id) => parts.get(id).dataset.needs.split(" ").filter((needed) => parts.has(needed));
  const wires = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  wires.setAttribute("class", "wires");
  wires.setAttribute("aria-hidden", "true");
  scopes.append(wires);
  let kept = null;

  function allNeedsOf(id, found = new Set()) {
    for (const needed of needsOf(id)) {
      if (!found.has(needed)) {
        found.add(needed);
        allNeedsOf(needed, found);
      }
    }
    return found;
  }

  function wire(from, to, kind) {
    const frame = scopes.getBoundingClientRect();
    const [a, b] = [from, to].map((id) => parts.get(id).getBoundingClientRect());
    const [x1, y1] = [a.left - frame.left + a.width / 2, (a.top + a.bottom) / 2 - frame.top];
    const [x2, y2] = [b.left - frame.left + b.width / 2, (b.top + b.bottom) / 2 - frame.top];
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    // From side to side where they stand beside each other, and past the left edges where one stands above the other.
    const beside = a.right < b.left || b.right < a.left;
    const [startX, endX] = beside
      ? [a.left < b.left ? a.right - frame.left : a.left - frame.left, a.left < b.left ? b.left - frame.left : b.right - frame.left]
      : [a.left - frame.left, b.left - frame.left];
    const bend = beside ? (endX - startX) / 2 : -14;
    path.setAttribute("d", `M${startX},${y1} C${startX + bend},${y1} ${endX - (beside ? bend : 14)},${y2} ${endX},${y2}`);
    path.setAttribute("class", kind);
    wires.append(path);
  }

  function show(id) {
    wires.replaceChildren();
    scopes.classList.toggle("lit", id !== null);
    const needed = id === null ? new Set() : allNeedsOf(id);
    const asking = new Set(id === null ? [] : [...parts.keys()].filter((other) => needsOf(other).includes(id)));
    for (const [other, part] of parts) {
      part.classList.toggle("is-chosen", other === id);
      part.classList.toggle("is-needed", needed.has(other));
      part.classList.toggle("asks", asking.has(other));
      part.querySelector("button").setAttribute("aria-pressed", String(other === kept));
    }
    if (id === null) return;
    for (const user of [id, ...needed]) for (const other of needsOf(user)) wire(other, user, "needs");
    for (const other of asking) wire(id, other, "asks");
  }

  const back = () => show(kept);
  for (const [id, part] of parts) {
    part.addEventListener("pointerenter", () => show(id));
    part.addEventListener("pointerleave", back);
    part.addEventListener("focusin", () => show(id));
    part.addEventListener("focusout", back);
    part.querySelector("button").addEventListener("click", () => {
      kept = kept === id ? null : id;
      show(id);
    });
  }
  scopes.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      kept = null;
      show(null);
    }
  });
  addEventListener("resize", back);
}
