// The pictures of the page as they are shown now: [{src, words: px of the smallest, clear: share of pixels that show
// what is behind, strong: share of pixels that stand out from the picture's own background}].
const luminance = (r, g, b) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const contrast = (one, other) => (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);

async function words(picture) {
    if (!picture.src.endsWith(".svg")) return null;
    const host = document.createElement("div");
    host.style.width = `${picture.getBoundingClientRect().width}px`;
    document.body.append(host);
    const inside = host.attachShadow({mode: "open"});
    inside.innerHTML = await (await fetch(picture.src)).text();
    const svg = inside.querySelector("svg");
    svg.style.width = "100%";
    svg.style.height = "auto";
    const sizes = [...inside.querySelectorAll("text")].filter(text => text.textContent.trim()).map(text => {
        const matrix = text.getScreenCTM();
        return parseFloat(getComputedStyle(text).fontSize) * Math.hypot(matrix.a, matrix.b);
    });
    host.remove();
    return sizes.length ? Math.min(...sizes) : null;
}

function pixels(picture) {
    const wide = 800, tall = Math.round(wide * picture.naturalHeight / picture.naturalWidth);
    const context = new OffscreenCanvas(wide, tall).getContext("2d");
    context.drawImage(picture, 0, 0, wide, tall);
    const data = context.getImageData(0, 0, wide, tall).data, counts = new Map();
    let clear = 0;
    for (let i = 0; i < data.length; i += 4) {
        if (data[i + 3] < 250) clear++;
        const key = (data[i] << 16) | (data[i + 1] << 8) | data[i + 2];
        counts.set(key, (counts.get(key) || 0) + 1);
    }
    const light = key => luminance(key >> 16, (key >> 8) & 255, key & 255);
    const below = light([...counts].sort((a, b) => b[1] - a[1])[0][0]);
    const strong = [...counts].filter(([key]) => contrast(light(key), below) >= 4.5).reduce((sum, [, n]) => sum + n, 0);
    return {clear: clear / (wide * tall), strong: strong / (wide * tall)};
}

const found = [];
for (const picture of document.querySelectorAll("article img, body > img"))
    found.push({src: picture.src, words: await words(picture), ...pixels(picture)});
return found;
