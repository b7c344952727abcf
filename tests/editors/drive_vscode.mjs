// Drives a browser-hosted VS Code workbench through the whole path, as a person would: diagnostics in the problems
// panel, search, status bar, apply, undo is the editor's own, restore. What is seen goes as JSON to DRIVE_LOG.
// DRIVE_URL is the workbench, DRIVE_FOLDER the opened folder, DRIVE_BROWSER a Chromium. With DRIVE_CHECK, a command line
// that tests what was applied, all of it is real and begins with a profile.
import { spawnSync } from "node:child_process";
import { readFileSync, writeFileSync, existsSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const { chromium } = createRequire(join(process.env.DRIVE_PLAYWRIGHT, "/"))("playwright-core");
const seen = { steps: [] };
const CHECK = process.env.DRIVE_CHECK;
const LIMIT_MS = CHECK ? 300000 : 120000;
const folder = process.env.DRIVE_FOLDER;
const model = join(folder, "model.py");

function step(name) {
  seen.steps.push(name);
  writeFileSync(process.env.DRIVE_LOG, JSON.stringify(seen));
}

async function until(what, ready) {
  const end = Date.now() + LIMIT_MS;
  while (Date.now() < end) {
    if (await ready()) return;
    await new Promise((resolve) => setTimeout(resolve, 250));
  }
  throw new Error(`waited in vain for ${what}`);
}

async function palette(page, text) {
  await page.keyboard.press("F1");
  const input = page.locator(".quick-input-widget input.input");
  await input.waitFor({ state: "visible", timeout: LIMIT_MS });
  await input.fill(`>${text}`);
  await page.locator(".quick-input-list .monaco-list-row", { hasText: text }).first().waitFor({ timeout: LIMIT_MS });
  await page.keyboard.press("Enter");
}

async function openFile(page) {
  const tab = page.locator(".tab", { hasText: "model.py" }).first();
  if (await tab.isVisible()) {
    await tab.click();
    return;
  }
  const entry = page.locator(".explorer-folders-view .monaco-list-row", { hasText: "model.py" }).first();
  await entry.waitFor({ timeout: LIMIT_MS });
  await entry.dblclick();
  await page.locator(".monaco-editor .view-lines").first().waitFor({ timeout: LIMIT_MS });
}

const browser = await chromium.launch({ executablePath: process.env.DRIVE_BROWSER, args: ["--no-sandbox"] });
try {
  const page = await browser.newPage({ viewport: { width: 1500, height: 1000 } });
  await page.goto(`${process.env.DRIVE_URL}/?folder=${folder}`);
  await page.locator(".monaco-workbench").waitFor({ timeout: LIMIT_MS });
  step("workbench");
  await openFile(page);
  const status = page.locator(".statusbar-item", { hasText: "drk" }).first();
  await status.waitFor({ timeout: LIMIT_MS });
  step("status bar");
  if (CHECK) {
    await palette(page, "drk: Profile This File");
  }
  const share = CHECK ? "% of CPU time · find faster kernels" : "98 % of GPU time";
  const lens = page.locator(".codelens-decoration a", { hasText: share }).first();
  await lens.waitFor({ timeout: LIMIT_MS });
  seen.lens = await lens.textContent();
  step("lens");
  const original = readFileSync(model, "utf8");
  if (CHECK) {
    await openFile(page);
    await palette(page, "drk: Find Faster Kernels for This File"); // the lens that is first may be an inner class's
  } else {
    await lens.click();
  }
  const offer = page.locator(".codelens-decoration a", { hasText: "apply kernels" }).first();
  await offer.waitFor({ timeout: LIMIT_MS });
  seen.offer = await offer.textContent();
  step("suggestion");
  await openFile(page);
  await palette(page, "drk: Apply the Newest Kernels");
  await until("saved files", () => readFileSync(model, "utf8") !== original && existsSync(join(folder, "model_kernels.py")));
  seen.applied = readFileSync(model, "utf8");
  await until("kernels on disk", () => readFileSync(join(folder, "model_kernels.py"), "utf8").length > 0);
  if (CHECK) {
    const done = spawnSync(CHECK, { shell: true, cwd: folder, encoding: "utf8" });
    seen.check = done.stdout + done.stderr;
    seen.check_code = done.status;
  }
  step("applied");
  await openFile(page);
  await palette(page, "drk: Take the Kernels out of This File");
  await until("the restored file", () => readFileSync(model, "utf8") === original);
  await until("removed files", () => !existsSync(join(folder, "model_kernels.py")));
  step("restored");
} catch (fault) {
  seen.fault = String(fault);
  const pages = browser.contexts().flatMap((context) => context.pages());
  await pages[0]?.screenshot({ path: `${process.env.DRIVE_LOG}.png` });
} finally {
  writeFileSync(process.env.DRIVE_LOG, JSON.stringify(seen));
  await browser.close();
}
