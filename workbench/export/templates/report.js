"use strict";
// Moves the present step along the tokens. Everything that comes from the session is put in as text, never as markup.
for (const box of document.querySelectorAll(".sequence")) {
  const recorded = JSON.parse(box.querySelector("script").textContent);
  const cells = [...box.querySelectorAll("td[data-step]")];
  const heads = [...box.querySelectorAll("th[data-step]")];
  const sides = box.querySelector(".sides");
  const slider = box.querySelector("input");
  const output = box.querySelector("output");
  const make = (tag, text, name) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (name) element.className = name;
    return element;
  };
  const side = (line, choice) => {
    const table = make("table");
    const caption = make("caption");
    caption.append(make("span", line.name + " ", "quiet"), make("bdi", choice.label, "strong"));
    if (choice.note) caption.append(make("span", "  " + choice.note, "quiet"));
    table.append(caption);
    const body = table.createTBody();
    for (const [label, p, logit, chosen] of choice.top) {
      const row = body.insertRow();
      if (chosen) row.className = "chosen";
      const text = row.insertCell();
      text.append(make("bdi", label));
      row.insertCell().textContent = p;
      row.insertCell().append(make("span", "", typeof p === "number" ? "bar p" + Math.round(10 * p) : ""));
      row.insertCell().textContent = logit;
    }
    return table;
  };
  const show = (step) => {
    for (const cell of [...cells, ...heads]) cell.classList.toggle("now", cell.dataset.step === String(step));
    slider.value = recorded.steps.indexOf(step);
    output.textContent = "step " + step;
    const found = recorded.lines.filter((line) => line.choices[step]).map((line) => side(line, line.choices[step]));
    sides.replaceChildren(...found);
  };
  for (const cell of cells) {
    const step = Number(cell.dataset.step);
    cell.addEventListener("mouseenter", () => show(step));
    cell.addEventListener("click", () => show(step));
  }
  slider.max = recorded.steps.length - 1;
  slider.addEventListener("input", () => show(recorded.steps[slider.value]));
  if (recorded.steps.length) show(recorded.steps.includes(recorded.now) ? recorded.now : recorded.steps[recorded.steps.length - 1]);
}
