// Charts: `<figure class="chart" data-chart="URL" data-every="5">` reads `{at, series: [{name, unit, values}]}`.
"use strict";

(() => {
  const DASHES = [[], [6, 4], [2, 3]];
  const clock = (at) => (at === undefined ? "–" : new Date(at * 1000).toISOString().slice(11, 19));
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

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
          points: { show: false }, value: (chart, value, i, at) => `${text(known(chart, i, at, value))} ${each.unit}`,
        })),
      ],
    };
  }

  for (const figure of document.querySelectorAll("[data-chart]")) {
    const place = figure.querySelector("[data-plot]");
    let chart = null;
    let shown = null;
    const draw = (body) => {
      const data = [body.at, ...body.series.map((each) => each.values)];
      if (chart === null) {
        chart = new uPlot(options(place, body.series), data, place);
      } else {
        chart.setData(data);
      }
      shown = body;
      figure.dataset.points = String(body.at.length);
    };
    const redraw = () => { if (shown !== null) { chart?.destroy(); chart = null; draw(shown); } };
    new ResizeObserver(() => chart?.setSize({ width: place.clientWidth, height: 170 })).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    figure.addEventListener("figures", (event) => {
      figure.classList.remove("stale");
      draw(event.detail);
    });
    fetch(figure.dataset.chart).then(async (answer) => {
      if (shown === null) draw(await answer.json());
    }).catch(() => figure.classList.add("stale"));
  }
})();
