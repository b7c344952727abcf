// The VS Code client of drk: starts the language server, shows its jobs in the status bar, and gives its commands names.
// Everything else (diagnostics, actions, lenses, hints, hover, edits) is the protocol's and the same in every editor.

import * as vscode from "vscode";
import {
  LanguageClient,
  LanguageClientOptions,
  RevealOutputChannelOn,
  ServerOptions,
  State,
  TransportKind,
} from "vscode-languageclient/node";

const COMMANDS: Record<string, string> = {
  "drk.findKernels": "drk.optimize",
  "drk.profileFile": "drk.profile",
  "drk.applyKernels": "drk.apply",
  "drk.restoreFile": "drk.restore",
  "drk.showDiff": "drk.diff",
  "drk.openReportPage": "drk.openReport",
  "drk.stopJobs": "drk.cancel",
};

let client: LanguageClient | undefined;

/** Shows the newest state of the server and of its jobs. */
class StatusBar implements vscode.Disposable {
  private readonly item = vscode.window.createStatusBarItem("drk", vscode.StatusBarAlignment.Left, 0);
  private readonly jobs = new Map<string | number, string>();

  constructor() {
    this.item.name = "drk";
    this.item.command = "drk.showStatus";
    this.show("$(loading~spin) drk", "starting");
    this.item.show();
  }

  /** Takes one progress notification of the server. */
  progress(token: string | number, value: { kind: string; message?: string }): void {
    if (value.kind === "end") {
      this.jobs.delete(token);
    } else {
      this.jobs.set(token, value.message ?? "working");
    }
    this.ready();
  }

  ready(): void {
    const first = [...this.jobs.values()].at(-1);
    if (first === undefined) {
      this.show("$(zap) drk", vscode.workspace.isTrusted ? "ready" : "this workspace is not trusted: nothing is run");
    } else {
      this.show(`$(loading~spin) drk: ${first}`, [...this.jobs.values()].join("\n"));
    }
  }

  failed(reason: string): void {
    this.jobs.clear();
    this.show("$(warning) drk", reason);
  }

  dispose(): void {
    this.item.dispose();
  }

  private show(text: string, tooltip: string): void {
    this.item.text = text;
    this.item.tooltip = tooltip;
  }
}

export async function activate(context: vscode.ExtensionContext): Promise<void> {
  const status = new StatusBar();
  context.subscriptions.push(status);
  for (const [name, command] of Object.entries(COMMANDS)) {
    context.subscriptions.push(vscode.commands.registerCommand(name, () => execute(command)));
  }
  context.subscriptions.push(
    vscode.commands.registerCommand("drk.showStatus", showStatus),
    vscode.commands.registerCommand("drk.restartServer", () => restart(status)),
    vscode.workspace.onDidGrantWorkspaceTrust(() => {
      void client?.sendNotification("drk/trusted", {});
      status.ready();
    }),
    vscode.workspace.onDidChangeConfiguration((change) => {
      if (change.affectsConfiguration("drk.serverCommand")) {
        void restart(status);
      }
    }),
  );
  await start(status);
}

export async function deactivate(): Promise<void> {
  await client?.dispose();
  client = undefined;
}

async function start(status: StatusBar): Promise<void> {
  const [command, ...args] = vscode.workspace.getConfiguration("drk").get<string[]>("serverCommand", ["drk", "lsp"]);
  if (!command) {
    status.failed("drk.serverCommand is empty");
    return;
  }
  const server: ServerOptions = { command, args, transport: TransportKind.stdio };
  const options: LanguageClientOptions = {
    documentSelector: [{ scheme: "file", language: "python" }],
    initializationOptions: { trusted: vscode.workspace.isTrusted },
    revealOutputChannelOn: RevealOutputChannelOn.Never,
    synchronize: { configurationSection: "drk" },
    middleware: {
      handleWorkDoneProgress: (token, params, next) => {
        status.progress(token, params as { kind: string; message?: string });
        next(token, params);
      },
    },
  };
  client = new LanguageClient("drk", "Dr. Kernel", server, options);
  client.onDidChangeState((change) => {
    if (change.newState === State.Running) {
      status.ready();
    } else if (change.newState === State.Stopped) {
      status.failed("the server is not running");
    }
  });
  try {
    await client.start();
  } catch (fault) {
    const reason = fault instanceof Error ? fault.message : String(fault);
    status.failed(reason);
    const help = "Install it with: pip install 'drk[lsp]', or set drk.serverCommand.";
    void vscode.window.showWarningMessage(`drk: the server ${command} does not start. ${help}`);
  }
}

async function restart(status: StatusBar): Promise<void> {
  await client?.dispose();
  await start(status);
}

async function execute(command: string): Promise<unknown> {
  const editor = vscode.window.activeTextEditor;
  if (client?.state !== State.Running || editor?.document.languageId !== "python") {
    void vscode.window.showInformationMessage("drk: open a Python file first.");
    return undefined;
  }
  return vscode.commands.executeCommand(command, { uri: editor.document.uri.toString() });
}

async function showStatus(): Promise<void> {
  const uri = vscode.window.activeTextEditor?.document.uri;
  const told = await client?.sendRequest("workspace/executeCommand", {
    command: "drk.status",
    arguments: [uri?.scheme === "file" ? { uri: uri.toString() } : {}],
  });
  client?.outputChannel.appendLine(JSON.stringify(told, null, 2));
  client?.outputChannel.show();
}
