"use strict";
// Draws every picture from the JSON beside it, in the colours of the page, light or dark.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = () => innerWidth < 600;
  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // What of a layout depends on the theme, as the flat paths that Plotly.relayout takes.
  const themed = (layout) => {
    const paths = {
      "font.color": ink("--ink"),
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      "hoverlabel.bgcolor": ink("--raised"),
      "hoverlabel.bordercolor": ink("--soft"),
      "hoverlabel.font.color": ink("--ink"),
      "modebar.bgcolor": "rgba(0,0,0,0)",
      "modebar.color": ink("--soft"),
      "modebar.activecolor": ink("--ink"),
    };
    for (const key of Object.keys(layout)) {
      if (!/^[xy]axis\d*$/.test(key)) continue;
      paths[`${key}.gridcolor`] = ink("--grid");
      paths[`${key}.linecolor`] = ink("--line");
      paths[`${key}.tickcolor`] = ink("--line");
      paths[`${key}.zerolinecolor`] = ink("--line");
    }
    (layout.shapes || []).forEach((shape, at) => {
      if (shape.name === "ink") paths[`shapes[${at}].line.color`] = ink("--ink");
    });
    return paths;
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
    if (narrow()) layout.font.size = 11;
    try {
      await Plotly.newPlot(plot, data, layout, config(layout));
      await Plotly.relayout(plot, themed(layout));
      dark.addEventListener("change", () => Plotly.relayout(plot, themed(layout)));
      legend(figure, plot, data);
      figure.dataset.drawn = "yes";
    } catch (error) {
      figure.dataset.drawn = "no";
      plot.className = "broken";
      plot.textContent = `This picture could not be drawn: ${error.message}`;
      throw error;
    }
  };

  const all = [...document.querySelectorAll("figure.picture")];
  Promise.all(all.map(draw)).then(() => { document.documentElement.dataset.drawn = "yes"; });
})();
