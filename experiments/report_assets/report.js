"use strict";

// Draws the figures of the report from the JSON that the page carries. Every figure
// that is drawn gets data-drawn, the number of its panels; errors are counted in
// data-errors of the page.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 320;
const HEIGHT = 220;
const EDGE = { left: 46, right: 16, top: 8, bottom: 32 };
const COLOURS = 8;
const DASHES = ["", "6 3", "2 3"];
const SHOWN = 6; // lines that are switched on at first

let errors = 0;
function countError() {
  errors += 1;
  document.documentElement.dataset.errors = String(errors);
}
window.addEventListener("error", countError);
document.documentElement.dataset.errors = "0";

function element(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.appendChild(made);
  return made;
}

function html(name, className, text, parent) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

function look(index) {
  return {
    colour: `var(--c${index % COLOURS})`,
    dash: DASHES[Math.floor(index / COLOURS) % DASHES.length],
    width: index === 0 ? 2.2 : 1.5,
  };
}

function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return value.toFixed(0);
  if (size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

// About `number` round values between two limits.
function ticks(low, high, number) {
  const step = (high - low) / number;
  const power = Math.pow(10, Math.floor(Math.log10(step)));
  const nice = [1, 2, 5, 10].find((n) => n * power >= step) * power;
  const found = [];
  for (let i = Math.ceil(low / nice - 1e-9); i * nice <= high + 1e-9 * nice; i += 1) {
    found.push(Number((i * nice).toPrecision(12)));
  }
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low) - 1e-9); Math.pow(10, power) <= high * 1.000001; power += 1) {
    found.push(Math.pow(10, power));
  }
  return found.length >= 2 ? found : [low, Math.sqrt(low * high), high];
}

// Limits of what is visible; with logarithms only what is positive counts.
function limits(lines, isLog) {
  const xs = lines.flatMap((line) => line.x);
  let ys = lines.flatMap((line) => line.mean.flatMap((m, i) => [m - line.error[i], m + line.error[i], m]));
  if (isLog) ys = ys.filter((y) => y > 0);
  if (!xs.length || !ys.length) return null;
  let [low, high] = [Math.min(...ys), Math.max(...ys)];
  if (isLog) {
    if (high / low < 1.01) [low, high] = [low / 1.5, high * 1.5];
  } else {
    const room = (high - low || Math.abs(high) || 1) * 0.05;
    [low, high] = [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  }
  let [left, right] = [Math.min(...xs), Math.max(...xs)];
  if (left === right) [left, right] = [left - 1, right + 1];
  return { low, high, left, right };
}

function scales(range, isLog) {
  const size = { x: WIDTH - EDGE.left - EDGE.right, y: HEIGHT - EDGE.top - EDGE.bottom };
  const map = isLog ? Math.log : (y) => y;
  const [low, high] = [map(range.low), map(range.high)];
  return {
    x: (x) => EDGE.left + ((x - range.left) / (range.right - range.left)) * size.x,
    y: (y) => EDGE.top + (1 - (map(y) - low) / (high - low)) * size.y,
  };
}

function path(xs, ys, scale, isLog) {
  let text = "";
  let isDown = false;
  xs.forEach((x, i) => {
    if (isLog && ys[i] <= 0) {
      isDown = false;
      return;
    }
    text += `${isDown ? "L" : "M"}${scale.x(x).toFixed(1)},${scale.y(ys[i]).toFixed(1)}`;
    isDown = true;
  });
  return text;
}

function band(line, scale, floor, isLog) {
  const top = line.x.map((x, i) => [x, line.mean[i] + line.error[i]]);
  const bottom = line.x.map((x, i) => [x, line.mean[i] - line.error[i]]).reverse();
  const points = [...top, ...bottom].map(([x, y]) => [x, isLog ? Math.max(y, floor) : y]);
  return points.map(([x, y]) => `${scale.x(x).toFixed(1)},${scale.y(y).toFixed(1)}`).join(" ");
}

function drawAxes(svg, figure, range, scale, isLog) {
  const bottom = HEIGHT - EDGE.bottom;
  for (const y of isLog ? logTicks(range.low, range.high) : ticks(range.low, range.high, 4)) {
    element("line", { class: "grid", x1: EDGE.left, x2: WIDTH - EDGE.right, y1: scale.y(y), y2: scale.y(y) }, svg);
    const text = element("text", { x: EDGE.left - 5, y: scale.y(y) + 4, "text-anchor": "end" }, svg);
    text.textContent = short(y);
  }
  for (const x of ticks(range.left, range.right, 4)) {
    const text = element("text", { x: scale.x(x), y: bottom + 14, "text-anchor": "middle" }, svg);
    text.textContent = short(x);
  }
  element("line", { class: "grid", x1: EDGE.left, x2: WIDTH - EDGE.right, y1: bottom, y2: bottom }, svg);
  const name = element("text", { x: WIDTH - EDGE.right, y: HEIGHT - 3, "text-anchor": "end" }, svg);
  name.textContent = figure.x;
}

function drawPanel(box, figure, panel, state) {
  box.replaceChildren();
  html("h4", "", panel.title, box);
  const lines = panel.series.filter((line) => state.visible.has(line.name));
  const range = limits(lines, state.isLog);
  if (!range) {
    const why = panel.reason || (panel.series.length ? "nothing to show with this choice" : "no data");
    html("div", "empty", `– ${why}`, box);
    return;
  }
  const scale = scales(range, state.isLog);
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${figure.title}, ${panel.title}` }, box);
  if (panel.shaded > range.left) {
    const end = scale.x(Math.min(panel.shaded, range.right));
    element("rect", { x: EDGE.left, y: EDGE.top, width: end - EDGE.left, height: HEIGHT - EDGE.top - EDGE.bottom, fill: "var(--shade)" }, svg);
  }
  drawAxes(svg, figure, range, scale, state.isLog);
  for (const line of lines) {
    const style = look(state.names.indexOf(line.name));
    if (line.error.some((e) => e > 0)) {
      element("polygon", { points: band(line, scale, range.low, state.isLog), fill: style.colour, opacity: 0.15 }, svg);
    }
    element("path", { d: path(line.x, line.mean, scale, state.isLog), fill: "none", stroke: style.colour, "stroke-width": style.width, "stroke-dasharray": style.dash }, svg);
    if (line.x.length < 12) {
      line.x.forEach((x, i) => {
        if (!state.isLog || line.mean[i] > 0) element("circle", { cx: scale.x(x), cy: scale.y(line.mean[i]), r: 2.5, fill: style.colour }, svg);
      });
    }
  }
  addHover(box, svg, figure, lines, range, scale, state);
}

// Values under the pointer, nearest point of every line.
function addHover(box, svg, figure, lines, range, scale, state) {
  const cross = element("line", { class: "cross", y1: EDGE.top, y2: HEIGHT - EDGE.bottom, visibility: "hidden" }, svg);
  const tip = html("div", "tip", "", box);
  tip.hidden = true;
  svg.addEventListener("pointermove", (event) => {
    const place = svg.getBoundingClientRect();
    const inside = ((event.clientX - place.left) / place.width) * WIDTH;
    const share = (inside - EDGE.left) / (WIDTH - EDGE.left - EDGE.right);
    const wanted = range.left + share * (range.right - range.left);
    tip.replaceChildren();
    let at = null;
    for (const line of lines) {
      let best = 0;
      line.x.forEach((x, i) => {
        if (Math.abs(x - wanted) < Math.abs(line.x[best] - wanted)) best = i;
      });
      if (at === null) {
        at = line.x[best];
        html("strong", "", `${figure.x} ${short(at)}`, tip);
      }
      const row = html("div", "", `${line.name} ${short(line.mean[best])}`, tip);
      row.style.color = look(state.names.indexOf(line.name)).colour;
      if (line.error[best] > 0) row.textContent += ` ± ${short(line.error[best])}`;
    }
    cross.setAttribute("x1", scale.x(at));
    cross.setAttribute("x2", scale.x(at));
    cross.setAttribute("visibility", "visible");
    tip.hidden = false;
    const isRight = share > 0.5;
    tip.style.left = isRight ? "auto" : `${event.clientX - place.left + 14}px`;
    tip.style.right = isRight ? `${place.right - event.clientX + 14}px` : "auto";
    tip.style.top = "2.2rem";
  });
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    cross.setAttribute("visibility", "hidden");
  });
}

function drawFigure(place, figure) {
  const names = [...new Set(figure.panels.flatMap((panel) => panel.series.map((line) => line.name)))];
  const state = { names, visible: new Set(names.slice(0, SHOWN)), isLog: false };
  const legend = html("div", "legend", "", place);
  const panels = html("div", "panels", "", place);
  const boxes = figure.panels.map(() => html("div", "panel", "", panels));
  const draw = () => {
    boxes.forEach((box, i) => drawPanel(box, figure, figure.panels[i], state));
    place.dataset.drawn = String(boxes.length);
    place.dataset.scale = state.isLog ? "log" : "linear";
  };
  names.forEach((name, index) => {
    const label = html("label", "", "", legend);
    const input = html("input", "", "", label);
    input.type = "checkbox";
    input.checked = state.visible.has(name);
    input.addEventListener("change", () => {
      if (input.checked) state.visible.add(name);
      else state.visible.delete(name);
      draw();
    });
    const style = look(index);
    const sample = element("svg", { viewBox: "0 0 26 8", "aria-hidden": "true" }, label);
    element("line", { x1: 0, x2: 26, y1: 4, y2: 4, stroke: style.colour, "stroke-width": style.width, "stroke-dasharray": style.dash }, sample);
    label.append(name);
  });
  const toggle = place.parentElement.querySelector("button[data-log]");
  toggle.addEventListener("click", () => {
    state.isLog = !state.isLog;
    toggle.setAttribute("aria-pressed", String(state.isLog));
    draw();
  });
  draw();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

function start() {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  setTheme(system.matches ? "dark" : "light");
  system.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  });
  const figures = JSON.parse(document.getElementById("figures").textContent);
  for (const place of document.querySelectorAll("[data-figure]")) {
    try {
      drawFigure(place, figures[place.dataset.figure]);
    } catch (error) {
      countError();
      console.error(error);
    }
  }
  document.documentElement.dataset.ready = "true";
}

start();
