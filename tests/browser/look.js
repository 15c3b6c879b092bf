// What a reader would stumble over on the page as it is shown now: {text too wide, text cut off, faint text, ...}.
const [across] = given; // px; innerWidth is more where a phone zooms out to show a page that is too wide
const frame = () => new Promise(resolve => requestAnimationFrame(resolve));
for (const running of document.getAnimations()) if (running.effect.getComputedTiming().endTime < Infinity) running.finish();
await frame(); await frame();

const name = element => `<${element.localName}> ${(element.textContent || element.src || "").trim().slice(0, 50)}`;
const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
const rgba = text => { // any CSS colour: what it paints, alpha from 0 to 1
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
};
const memo = new Map();
const colour = text => { if (!memo.has(text)) memo.set(text, rgba(text)); return memo.get(text); };
const over = (top, below) => [...[0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])), 1];
const behind = new Map();
const background = element => {
    if (!element) return dark ? [18, 18, 18, 1] : [255, 255, 255, 1];
    if (!behind.has(element))
        behind.set(element, over(colour(getComputedStyle(element).backgroundColor), background(element.parentElement)));
    return behind.get(element);
};
const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const contrast = (one, other) => {
    const [high, low] = [luminance(one), luminance(other)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
};
const dark = getComputedStyle(document.documentElement).colorScheme.includes("dark") && matchMedia("(prefers-color-scheme: dark)").matches;
const scrolls = element => {
    for (let e = element; e && e !== document.body; e = e.parentElement)
        if (["auto", "scroll"].includes(getComputedStyle(e).overflowX)) return true;
    return false;
};

const found = {scroll: [], cut: [], faint: [], small: []};
const wide = document.scrollingElement.scrollWidth;
if (wide > across) found.scroll.push(`the page is ${wide} px wide on ${across} px`);
const walker = document.createTreeWalker(document.querySelector("article") || document.body, NodeFilter.SHOW_TEXT);
const seen = new Set();
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (seen.has(element) || !node.data.trim() || !element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    seen.add(element);
    if (["style", "script", "title"].includes(element.localName)) continue;
    const box = element.getBoundingClientRect();
    if (box.width === 0 || element.closest(".headerlink, nav, [role=tooltip]")) continue;
    if (box.right > across + 1 && !scrolls(element)) found.cut.push(name(element));
    const style = getComputedStyle(element), svg = element.namespaceURI.endsWith("svg");
    const below = background(element), above = over(colour(svg ? style.fill : style.color), below);
    if (contrast(above, below) < 3) found.faint.push(`${name(element)} (${contrast(above, below).toFixed(1)}:1)`);
    const matrix = svg ? element.getScreenCTM() : {a: 1, b: 0};
    const size = parseFloat(style.fontSize) * Math.hypot(matrix.a, matrix.b);
    if (size < 9) found.small.push(`${name(element)} (${size.toFixed(1)} px)`);
}
return found;
