import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.locks.LockSupport;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * Stock mqadmin, one command per line of stdin, in one JVM: a start of its own for each takes seconds.
 * A line {"command", "output", "error"} for each; command words are separated by tabs.
 */
public final class MqAdmin {
    public static void main(String[] args) throws Exception {
        PrintStream stdout = System.out;
        PrintStream stderr = System.err;
        endEventThreadsAtOnce();
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            ByteArrayOutputStream output = new ByteArrayOutputStream();
            ByteArrayOutputStream error = new ByteArrayOutputStream();
            System.setOut(new PrintStream(output, true, "UTF-8"));
            System.setErr(new PrintStream(error, true, "UTF-8"));
            try {
                MQAdminStartup.main0(line.isEmpty() ? new String[0] : line.split("\t"), Acl.hook());
            } catch (Throwable thrown) {
                thrown.printStackTrace();
            } finally {
                System.setOut(stdout);
                System.setErr(stderr);
            }
            Lines.print("command", line, "output", output.toString("UTF-8"), "error", error.toString("UTF-8"));
        }
        System.exit(0);
    }

    /** The client's end waits up to 3 s for a thread that looks for events: an interrupt shows it that it may end. */
    private static void endEventThreadsAtOnce() {
        Thread interrupts = new Thread(() -> {
            while (true) {
                for (Thread each : Thread.getAllStackTraces().keySet()) {
                    if (each.getName().startsWith("NettyEventExecutor")) {
                        each.interrupt();
                    }
                }
                LockSupport.parkNanos(50_000_000L);
            }
        });
        interrupts.setDaemon(true);
        interrupts.start();
    }
}
