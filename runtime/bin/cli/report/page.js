// Draws what the page's data has. Everything that can be said in text is in the page already.
"use strict";
(() => {
  if (typeof uPlot !== "function") {
    const places = document.querySelectorAll(".chart");
    places.forEach((place) => (place.textContent = "This browser cannot draw the chart; the table has its numbers."));
    return;
  }
  const data = JSON.parse(document.getElementById("data").textContent);
  const width = () => Math.min(document.body.clientWidth, 1080);
  const colour = (at, of) => `hsl(${Math.round((360 * at) / of)} 70% ${at % 2 ? 48 : 38}%)`;
  const time = (s) => (s >= 1 ? s.toFixed(3) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(3) + " ms" : (s * 1e6).toFixed(1) + " \u00b5s");

  // What colours mean, above a chart.
  const legend = (place, entries) => {
    const keys = document.createElement("p");
    entries.forEach(([name, background]) => {
      const key = document.createElement("span");
      const square = document.createElement("i");
      key.className = "key";
      square.style.background = background;
      key.append(square, name);
      keys.append(key);
    });
    place.before(keys);
  };
  // The chart's own area to draw in, until it is restored.
  const clipped = (u) => {
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    u.ctx.clip();
    return u.ctx;
  };

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
      axes: [{ label: "pass" }, { label: "seconds", size: 80 }],
    };
    new uPlot(options, [passes.map((_, i) => i + 1), passes], document.getElementById("simulated-" + number));
  });

  // Timelines: a row for each lane, spans as they are or, where they are many, runs of them. Dragging looks closer.
  data.timelines.forEach((line, number) => {
    const place = document.getElementById("timeline-" + number);
    const names = line.names;
    const lanes = line.lanes;
    legend(place, names.map((name, i) => [name, colour(i, names.length)]));
    const under = document.createElement("p");
    under.id = "under-" + number;
    under.className = "note";
    under.textContent = "Drag to look closer; click twice for all of it.";
    place.after(under);
    const row = (lane) => lanes.length - 1 - lane;
    const draw = (u) => {
      const context = clipped(u);
      lanes.forEach((lane, at) => {
        const y0 = u.valToPos(row(at) + 0.85, "y", true);
        const y1 = u.valToPos(row(at) + 0.15, "y", true);
        lane.spans.forEach(([name, start, end]) => {
          if (end < u.scales.x.min || start > u.scales.x.max) return;
          const x0 = u.valToPos(start, "x", true);
          const x1 = u.valToPos(end, "x", true);
          context.fillStyle = colour(name, names.length);
          context.fillRect(x0, y0, Math.max(x1 - x0, 0.5), y1 - y0);
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
        ? `${lane.name}: ${names[span[0]]}, ${time(span[2] - span[1])} from ${time(span[1])} on`
        : `${lane ? lane.name + ", " : ""}${time(x)}`;
    };
    const options = {
      width: width(), height: 60 + 56 * lanes.length, legend: { show: false },
      series: [{}, { show: false }],
      scales: { x: { time: false, range: (u, min, max) => [min, max] }, y: { range: [0, lanes.length] } },
      axes: [
        { label: "seconds" },
        {
          size: 90, grid: { show: false }, splits: () => lanes.map((_, i) => row(i) + 0.5),
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
    legend(place, tiers.map(([name, rgb]) => [name, `rgb(${rgb})`]));
    const samples = seen.samples;
    const rows = samples.length ? samples[0].device.length : 0;
    const pages = seen.files.reduce((sum, file) => sum + file.pages, 0);
    const start = (i) => samples[i].ts / 1e6;
    const last = Math.max(line.end, samples.length ? start(samples.length - 1) : 0);
    const draw = (u) => {
      const context = clipped(u);
      samples.forEach((sample, i) => {
        const x0 = u.valToPos(start(i), "x", true);
        const x1 = u.valToPos(i + 1 < samples.length ? start(i + 1) : last, "x", true);
        if (x1 < u.bbox.left || x0 > u.bbox.left + u.bbox.width) return;
        for (let at = 0; at < rows; at++) {
          const shares = [sample.device[at] / 100, sample.host[at] / 100];
          if (shares[0] + shares[1] === 0) continue;
          const colour = [0, 1, 2].map((c) => Math.round(shares.reduce((v, s, t) => v - s * (255 - tiers[t][1][c]), 255)));
          context.fillStyle = `rgb(${colour})`;
          const y0 = u.valToPos(pages * (1 - at / rows), "y", true);
          const y1 = u.valToPos(pages * (1 - (at + 1) / rows), "y", true);
          context.fillRect(x0, y0, Math.max(x1 - x0, 0.5), y1 - y0 + 0.5);
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
        { label: "page", size: 90, grid: { show: false }, values: (u, splits) => splits.map((v) => Math.round(pages - v)) },
      ],
      cursor: { y: false },
      hooks: { draw: [draw] },
    };
    new uPlot(options, [[line.start, last], [0, 0]], place);
  });
  document.body.dataset.drawn = "all";
})();
