"use strict";
// Draws the pictures from the JSON beside them, sorts tables, opens stories.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = () => innerWidth < 600;
  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // What all pictures share, in the colours of the page.
  const template = () => {
    const axis = {
      gridcolor: ink("--grid"), linecolor: ink("--line"), tickcolor: ink("--line"),
      zeroline: false, automargin: true, hoverformat: "%Y-%m-%d %H:%M:%S",
    };
    const steps = [
      [null, 1000, "%H:%M:%S.%L"], [1000, 60000, "%H:%M:%S\n%b %-d, %Y"],
      [60000, 86400000, "%H:%M\n%b %-d, %Y"], [86400000, "M1", "%b %-d\n%Y"],
      ["M1", "M12", "%b\n%Y"], ["M12", null, "%Y"],
    ].map(([from, to, value]) => ({ dtickrange: [from, to], value }));
    return { layout: {
      font: {
        family: 'system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif',
        size: narrow() ? 11 : 13, color: ink("--ink"),
      },
      margin: { l: 10, r: 16, t: 28, b: 42, autoexpand: true },
      showlegend: false, hovermode: "closest", bargap: 0.2, dragmode: "zoom",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: {
        align: "left", namelength: -1, bgcolor: ink("--raised"), bordercolor: ink("--soft"),
        font: { color: ink("--ink") },
      },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: ink("--soft"), activecolor: ink("--ink") },
      xaxis: { ...axis, tickformatstops: steps }, yaxis: axis,
      shapedefaults: { line: { color: ink("--ink") } },
    } };
  };

  // Only buttons that work on what is here: none that would send a picture somewhere.
  const config = (layout) => ({
    responsive: true,
    displaylogo: false,
    displayModeBar: narrow() || layout.dragmode === false ? false : "hover",
    modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"], ["toImage"]],
    doubleClick: "reset",
  });

  const SIGNS = { "triangle-down": "\u25bc", diamond: "\u25c6", square: "\u25a0", x: "\u2716" };

  // A legend of the page's own: it folds on a phone, and a click hides what it names.
  const legend = (figure, plot, data) => {
    const named = data.map((trace, at) => [trace, at]).filter(([t]) => t.meta && t.meta.legend);
    if (named.length < 2) return;
    const list = document.createElement("div");
    list.className = "legend";
    for (const [trace, at] of named) {
      const button = document.createElement("button");
      const sign = document.createElement("span");
      const symbol = trace.type === "scatter" && trace.marker ? trace.marker.symbol : "square";
      sign.textContent = SIGNS[symbol] || "\u25cf";
      sign.style.color = trace.meta.colour;
      button.append(sign, ` ${trace.meta.legend}`);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const shown = button.getAttribute("aria-pressed") === "true";
        button.setAttribute("aria-pressed", String(!shown));
        Plotly.restyle(plot, { visible: !shown }, [at]);
      });
      list.append(button);
    }
    plot.before(list);
  };

  const draw = async (figure) => {
    const plot = figure.querySelector(".plot");
    const { data, layout } = JSON.parse(figure.querySelector("script").textContent);
    // A finger that scrolls the page must not zoom a picture.
    if (matchMedia("(pointer: coarse)").matches || narrow()) layout.dragmode = false;
    try {
      layout.template = template();
      await Plotly.newPlot(plot, data, layout, config(layout));
      dark.addEventListener("change", () => Plotly.relayout(plot, { template: template() }));
      plot.on("plotly_click", ({ points }) => follow(points[0].customdata));
      legend(figure, plot, data);
      figure.dataset.drawn = "yes";
    } catch (error) {
      figure.dataset.drawn = "no";
      plot.className = "broken";
      plot.textContent = `This picture could not be drawn: ${error.message}`;
      throw error;
    }
  };

  // A story opens when something leads to it.
  const follow = (id) => {
    if (id && document.getElementById(id)) location.hash = encodeURIComponent(id);
  };
  const reveal = () => {
    const story = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (story && story.tagName === "DETAILS") story.open = true;
  };
  addEventListener("hashchange", reveal);
  reveal();

  // Unknown values stay last, whichever way a table is sorted.
  const sort = (head) => {
    const rows = [...head.closest("table").tBodies[0].rows];
    const up = head.getAttribute("aria-sort") === "descending";
    const value = (row) => row.cells[head.cellIndex].dataset.value;
    const text = (row) => row.cells[head.cellIndex].textContent;
    const numbers = rows.some((row) => value(row) !== undefined);
    const compare = (a, b) => {
      if (!numbers) return text(a).localeCompare(text(b)) * (up ? 1 : -1);
      if (value(a) === undefined || value(b) === undefined) {
        return (value(a) === undefined) - (value(b) === undefined);
      }
      return (value(a) - value(b)) * (up ? 1 : -1);
    };
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    rows.sort(compare).forEach((row) => row.parentNode.append(row));
  };
  document.querySelectorAll("th button").forEach((button) => {
    button.addEventListener("click", () => sort(button.parentNode));
  });

  const all = [...document.querySelectorAll("figure.picture")];
  Promise.all(all.map(draw)).then(() => { document.documentElement.dataset.drawn = "yes"; });
})();
