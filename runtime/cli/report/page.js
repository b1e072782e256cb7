// Draws what the page's data has. Everything that can be said in text is in the page already.
"use strict";
(() => {
  if (typeof uPlot !== "function") {
    const places = document.querySelectorAll(".chart");
    places.forEach((place) => (place.textContent = "This browser cannot draw the chart; the table has its numbers."));
    return;
  }
  const data = JSON.parse(document.getElementById("data").textContent);
  const width = () => Math.min(document.body.clientWidth - 32, 1120);
  const colour = (at, of) => `hsl(${Math.round((360 * at) / of)} 70% ${at % 2 ? 48 : 38}%)`;
  const time = (s) => (s >= 1 ? s.toFixed(3) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(3) + " ms" : (s * 1e6).toFixed(1) + " \u00b5s");

  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  const size = (bytes) => {
    let unit = 0;
    while (bytes >= 1024 && unit + 1 < units.length) (bytes /= 1024), unit++;
    return bytes.toFixed(unit && bytes % 1 ? 1 : 0) + " " + units[unit];
  };
  const percent = (part) => parseFloat((100 * part).toFixed(1)) + " %";
  // What colours mean, above a chart.
  const keys = (place, named) => {
    const line = document.createElement("p");
    named.forEach(([name, fill]) => {
      const key = document.createElement("span");
      const square = document.createElement("i");
      key.className = "key";
      square.style.background = fill;
      key.append(square, name);
      line.append(key);
    });
    place.before(line);
  };

  // The chart's own area to draw in, until it is restored.
  const clipped = (u) => {
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    u.ctx.clip();
    return u.ctx;
  };

  // Bars: what was used lies before what there is.
  const plain = (text) => text.replace(/(\.\d*?)0+(?= |$)/, "$1").replace(/\.(?= |$)/, "");
  const told = { seconds: time, bytes: size, rate: (v) => size(v) + "/s", ratio: (v) => v.toFixed(4), share: percent };
  const looks = { 1: [["#1f5fbf", 0.6]], 2: [["#cfd8e6", 0.8], ["#1f5fbf", 0.45]], 3: [["#e3e8ef", 0.84], ["#8fb4e3", 0.56], ["#1f5fbf", 0.28]] };
  data.bars.forEach((chart) => {
    const place = document.getElementById(chart.id);
    const { labels, series, unit } = chart;
    const look = looks[series.length];
    if (series.length > 1) keys(place, series.map((one, i) => [one.name, look[i][0]]));
    const say = told[unit];
    const all = series.flatMap((one) => one.values).filter((value) => value != null);
    const most = Math.max(...all, 0) || 1;
    const whole = unit === "ratio" || unit === "share" ? Math.max(most, 1) : most;
    const canvas = document.createElement("canvas").getContext("2d");
    canvas.font = "12px system-ui, sans-serif";
    const wide = (texts) => Math.ceil(Math.max(...texts.map((text) => canvas.measureText(text).width)));
    const longest = (at) => Math.max(0, ...series.map((one) => one.values[at] || 0));
    const texts = labels.map((_, at) => chart.told[at] || (series.some((one) => one.values[at] != null) ? say(longest(at)) : ""));
    // Room behind the longest bar for what is written there.
    const room = Math.min(0.5, (wide(texts) + 24) / Math.max(width() - wide(labels) - 40, 200));
    const end = whole / (1 - room);
    // Bytes in steps that are round in their own units.
    const step = unit === "bytes" || unit === "rate" ? 2 ** Math.ceil(Math.log2(whole / 5)) : null;
    const splits = (u, axis, min, max, found) => {
      const by = step && step >= 1 ? step : found;
      return Array.from({ length: Math.floor(whole / by + 1e-9) + 1 }, (_, i) => i * by);
    };
    const write = (u) => {
      const context = u.ctx;
      context.save();
      context.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
      context.fillStyle = "#222";
      context.textAlign = "left";
      context.textBaseline = "middle";
      texts.forEach((text, at) => {
        const x = u.valToPos(longest(at), "y", true) + 8 * devicePixelRatio;
        context.fillText(text, x, u.valToPos(at, "x", true));
      });
      context.restore();
    };
    const options = {
      width: width(), height: 46 + 34 * labels.length, legend: { show: false },
      scales: {
        x: { time: false, ori: 1, dir: -1, range: [-0.5, labels.length - 0.5] },
        y: { ori: 0, dir: 1, range: [0, end] },
      },
      axes: [
        { side: 3, size: wide(labels) + 18, gap: 8, grid: { show: false }, ticks: { show: false }, splits: () => labels.map((_, at) => at), values: () => labels },
        { side: 2, size: 40, space: 90, splits, values: (u, values) => values.map((v) => (v === 0 ? "0" : plain(say(v)))) },
      ],
      series: [
        {},
        ...series.map((one, i) => ({
          label: one.name, fill: look[i][0], stroke: look[i][0], width: 0, points: { show: false },
          paths: uPlot.paths.bars({ size: [look[i][1], 60] }),
        })),
      ],
      cursor: { show: false },
      hooks: { draw: [write] },
    };
    new uPlot(options, [labels.map((_, at) => at), ...series.map((one) => one.values)], place);
  });

  // Values over time.
  data.lines.forEach((chart) => {
    const say = told[chart.unit];
    const show = (u, value) => (value == null ? "" : plain(say(value)));
    const most = Math.max(...chart.series.flatMap((one) => one.values).filter((value) => value != null), 0) || 1;
    const whole = chart.unit === "ratio" ? 1 : most * 1.05;
    const options = {
      width: width(), height: 240,
      series: [
        { label: "seconds", value: (u, v) => (v == null ? "" : v.toFixed(2)) },
        ...chart.series.map((one, i) => ({
          label: one.name, stroke: ["#1f5fbf", "#e08a1e"][i % 2], width: 1.5, points: { show: chart.at.length < 60, size: 4 }, value: show,
        })),
      ],
      scales: { x: { time: false }, y: { range: [0, whole] } },
      axes: [{ label: "seconds" }, { size: 90, values: (u, values) => values.map((v) => (v === 0 ? "0" : plain(say(v)))) }],
    };
    new uPlot(options, [chart.at, ...chart.series.map((one) => one.values)], document.getElementById(chart.id));
  });

  // Hit ratios: LRU's curve at every capacity, the others through the capacities that were looked at.
  data.policies.forEach((found, number) => {
    const xs = [...new Set([...found.lru.map((p) => p.pages), ...found.capacities.map((c) => c.pages)])].sort((a, b) => a - b);
    const at = new Map(xs.map((x, i) => [x, i]));
    const column = (points) => {
      const values = new Array(xs.length).fill(null);
      points.forEach(([x, y]) => (values[at.get(x)] = y));
      return values;
    };
    const names = found.capacities.length ? found.capacities[0].policies.map((p) => p.policy) : [];
    const show = (u, value) => (value == null ? "" : value.toFixed(4));
    const points = { show: true, size: 6 };
    const series = [
      { label: "pages" },
      { label: "lru, every capacity", stroke: "#a0a7b3", width: 4, points: { show: false }, value: show },
      { label: "optimum", stroke: "#000", width: 2, spanGaps: true, points, value: show },
      ...names.map((name, i) => ({ label: name, stroke: colour(i, names.length), width: 1.5, spanGaps: true, points, value: show })),
    ];
    const values = [
      xs,
      column(found.lru.map((p) => [p.pages, p.hit_ratio])),
      column(found.capacities.map((c) => [c.pages, c.optimum.hit_ratio])),
      ...names.map((name, i) => column(found.capacities.map((c) => [c.pages, c.policies[i].hit_ratio]))),
    ];
    const options = {
      width: width(), height: 420, series,
      scales: { x: { time: false }, y: { range: [0, 1] } },
      axes: [{ label: "capacity in pages" }, { label: "hit ratio" }],
    };
    new uPlot(options, values, document.getElementById("policies-" + number));
  });

  // Simulated passes: how long each took.
  data.simulated.forEach((passes, number) => {
    const options = {
      width: width(), height: 260,
      series: [
        { label: "pass" },
        { label: "seconds", stroke: "#1f5fbf", width: 2, points: { show: true, size: 6 }, value: (u, v) => (v == null ? "" : time(v)) },
      ],
      scales: { x: { time: false }, y: { range: (u, min, max) => [0, (max || 1) * 1.1] } },
      axes: [{ label: "pass", incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9] }, { label: "seconds", size: 80 }],
    };
    new uPlot(options, [passes.map((_, i) => i + 1), passes], document.getElementById("simulated-" + number));
  });

  // Timelines: a row for each lane, spans as they are or, where they are many, runs of them. Dragging looks closer.
  data.timelines.forEach((line, number) => {
    const place = document.getElementById("timeline-" + number);
    const names = line.names;
    const lanes = line.lanes;
    keys(place, names.map((name, i) => [name, colour(i, names.length)]));
    const under = document.createElement("p");
    under.id = "under-" + number;
    under.className = "note";
    under.textContent = "Drag to look closer; click twice for all of it.";
    place.after(under);
    const row = (lane) => lanes.length - 1 - lane;
    const draw = (u) => {
      const context = clipped(u);
      const { left, width: w } = u.bbox;
      // Spans that are too short to be told apart are counted by columns of pixels, each as high as the part of its time
      // that they take; so a lane that is idle most of the time does not look busy.
      const from = u.scales.x.min;
      const each = (u.scales.x.max - from) / Math.max(Math.round(w), 1);
      lanes.forEach((lane, at) => {
        const y0 = u.valToPos(row(at) + 0.85, "y", true);
        const y1 = u.valToPos(row(at) + 0.15, "y", true);
        const columns = new Map();
        lane.spans.forEach(([name, start, end, taken]) => {
          if (end < from || start > u.scales.x.max) return;
          const [c0, c1] = [(start - from) / each, (end - from) / each];
          if (c1 - c0 < 3) {
            if (!columns.has(name)) columns.set(name, new Float64Array(Math.round(w) + 1));
            const of = columns.get(name);
            const [first, last] = [Math.max(Math.floor(c0), 0), Math.min(Math.floor(c1), of.length - 1)];
            for (let c = first; c <= last; c++) {
              const part = c1 > c0 ? (Math.min(c1, c + 1) - Math.max(c0, c)) / (c1 - c0) : 1;
              of[c] += part * taken;
            }
            return;
          }
          context.fillStyle = colour(name, names.length);
          const part = Math.min(taken / (end - start), 1);
          const high = part > 0.999 ? y1 - y0 : Math.max((y1 - y0) * part, 1);
          context.fillRect(left + c0, y1 - high, c1 - c0, high);
        });
        const base = new Float64Array(Math.round(w) + 1);
        columns.forEach((of, name) => {
          context.fillStyle = colour(name, names.length);
          of.forEach((taken, c) => {
            if (!taken) return;
            const high = Math.max(Math.min(taken / each, 1 - base[c]) * (y1 - y0), 1);
            context.fillRect(Math.round(left) + c, y1 - base[c] * (y1 - y0) - high, 1, high);
            base[c] = Math.min(base[c] + taken / each, 1);
          });
        });
      });
      context.restore();
    };
    const tell = (u) => {
      const { left, top } = u.cursor;
      if (left == null || left < 0) return;
      const x = u.posToVal(left, "x");
      const lane = lanes[lanes.length - 1 - Math.floor(u.posToVal(top, "y"))];
      const span = lane && lane.spans.find(([, start, end]) => start <= x && x <= end);
      under.textContent = span
        ? `${lane.name}: ${names[span[0]]}, ${time(span[3])} within ${time(span[2] - span[1])} from ${time(span[1])} on`
        : `${lane ? lane.name + ", " : ""}${time(x)}`;
    };
    const options = {
      width: width(), height: 60 + 56 * lanes.length, legend: { show: false },
      series: [{}, { show: false }],
      scales: { x: { time: false, range: (u, min, max) => [min, max] }, y: { range: [0, lanes.length] } },
      axes: [
        { label: "seconds" },
        {
          size: 100, grid: { show: false }, splits: () => lanes.map((_, i) => row(i) + 0.5),
          values: () => lanes.map((lane) => lane.name),
        },
      ],
      cursor: { y: false },
      hooks: { draw: [draw], setCursor: [tell] },
    };
    new uPlot(options, [[line.start, line.end], [0, 0]], place);
  });

  // Where pages were: time to the right, pages downwards, the stronger the colour the more of a row's pages.
  const tiers = [["device memory", [31, 95, 191]], ["host memory", [224, 138, 30]]];
  data.timelines.forEach((line, number) => {
    const seen = line.residency;
    if (!seen) return;
    const place = document.getElementById("residency-" + number);
    keys(place, tiers.map(([name, rgb]) => [name, `rgb(${rgb})`]));
    const samples = seen.samples;
    const rows = samples.length ? samples[0].device.length : 0;
    const pages = seen.files.reduce((sum, file) => sum + file.pages, 0);
    const start = (i) => samples[i].ts / 1e6;
    const last = Math.max(line.end, samples.length ? start(samples.length - 1) : 0);
    const draw = (u) => {
      const context = clipped(u);
      const { left, width: w } = u.bbox;
      samples.forEach((sample, i) => {
        // Whole pixels: between parts of them there would be seams.
        const x0 = Math.round(u.valToPos(start(i), "x", true));
        const x1 = Math.round(u.valToPos(i + 1 < samples.length ? start(i + 1) : last, "x", true));
        if (x1 < left || x0 > left + w) return;
        for (let at = 0; at < rows; at++) {
          const shares = [sample.device[at] / 100, sample.host[at] / 100];
          if (shares[0] + shares[1] === 0) continue;
          const colour = [0, 1, 2].map((c) => Math.round(shares.reduce((v, s, t) => v - s * (255 - tiers[t][1][c]), 255)));
          context.fillStyle = `rgb(${colour})`;
          const y0 = Math.round(u.valToPos(pages * (1 - at / rows), "y", true));
          const y1 = Math.round(u.valToPos(pages * (1 - (at + 1) / rows), "y", true));
          context.fillRect(x0, y0, Math.max(x1 - x0, 1), Math.max(y1 - y0, 1));
        }
      });
      context.restore();
    };
    const options = {
      width: width(), height: 360, legend: { show: false },
      series: [{}, { show: false }],
      scales: { x: { time: false, range: (u, min, max) => [min, max] }, y: { range: [0, Math.max(pages, 1)] } },
      axes: [
        { label: "seconds" },
        {
          label: "page", size: 90, grid: { show: false },
          splits: (u, axis, min, max, found) => Array.from({ length: Math.floor(pages / found) + 1 }, (_, i) => pages - i * found),
          values: (u, splits) => splits.map((v) => Math.round(pages - v)),
        },
      ],
      cursor: { y: false },
      hooks: { draw: [draw] },
    };
    new uPlot(options, [[line.start, last], [0, 0]], place);
  });
  document.body.dataset.drawn = "all";
})();
