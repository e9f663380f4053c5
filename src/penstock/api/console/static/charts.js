// Charts: `<section data-charts="URL" data-every="5">` reads `{at, charts: {NAME: [{name, unit, values}]}}` every 5 seconds, for each
// `<figure class="chart" data-chart="NAME">` in it.
"use strict";

(() => {
  const DASHES = [[], [6, 4], [2, 3]];
  const clock = (at) => (at === undefined ? "–" : new Date(at * 1000).toISOString().slice(11, 19));
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // The values that no line leads to, as those before and after are not known: they are drawn as points.
  function alone(chart, i) {
    const values = chart.data[i];
    const known = (at) => values[at] !== null && values[at] !== undefined;
    return values.flatMap((_, at) => (known(at) && !known(at - 1) && !known(at + 1) ? [at] : []));
  }

  function options(place, series) {
    const soft = css("--soft");
    const line = css("--line");
    const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui" };
    const strokes = [css("--accent"), css("--degraded"), css("--starting")];
    const minutes = [1, 2, 5, 10, 15, 30, 60].map((each) => each * 60); // a label of an axis names no second
    const known = (chart, i, at, value) => (at == null ? chart.data[i].at(-1) : value); // the newest, where none is pointed at
    const text = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: value < 1 ? 3 : 1 }));
    return {
      width: place.clientWidth, height: 170,
      cursor: { points: { size: 6 } },
      scales: { y: { range: (_, __, most) => [0, most > 0 ? most * 1.1 : 1] } },
      axes: [
        { ...axis, incrs: minutes, values: (chart, ticks) => ticks.map((at) => (at > chart.scales.x.max ? "" : clock(at).slice(0, 5))) },
        { ...axis, size: 60, values: (_, ticks) => ticks.map((value) => value.toLocaleString("en", { notation: "compact" })) },
      ],
      series: [
        { label: "UTC", value: (chart, value, i, at) => clock(known(chart, i, at, value)) },
        ...series.map((each, i) => ({
          label: each.name, stroke: strokes[i % strokes.length], dash: DASHES[i % DASHES.length], width: 1.75,
          points: { show: false, filter: alone }, value: (chart, value, i, at) => `${text(known(chart, i, at, value))} ${each.unit}`,
        })),
      ],
    };
  }

  // Returns what draws the values of a figure, all of them each time.
  function plotted(figure) {
    const place = figure.querySelector("[data-plot]");
    let chart = null;
    let shown = null;
    const draw = (at, series) => {
      const data = [at, ...series.map((each) => each.values)];
      if (chart === null) {
        chart = new uPlot(options(place, series), data, place);
      } else {
        chart.setData(data);
      }
      shown = [at, series];
      figure.dataset.points = String(at.length);
    };
    const redraw = () => { if (shown !== null) { chart?.destroy(); chart = null; draw(...shown); } };
    new ResizeObserver(() => chart?.setSize({ width: place.clientWidth, height: 170 })).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    return draw;
  }

  for (const section of document.querySelectorAll("[data-charts]")) {
    const figures = [...section.querySelectorAll("[data-chart]")].map((figure) => [figure.dataset.chart, plotted(figure)]);
    let known = false;
    const show = ({ at, charts }) => {
      known = true;
      section.classList.remove("stale");
      for (const [name, draw] of figures) draw(at, charts[name]);
    };
    section.addEventListener("figures", (event) => show(event.detail));
    fetch(section.dataset.charts).then(async (answer) => {
      const found = await answer.json();
      if (!known) show(found);
    }).catch(() => section.classList.add("stale"));
  }
})();
